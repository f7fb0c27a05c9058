"""What a text reaches before its wait: of small kernels, each with one thing to find."""

from __future__ import annotations

import pytest

from tests.support.ptx.errors import PtxError
from tests.support.ptx.kernel import load
from tests.support.ptx.reach import Reach, reach_of

HEAD = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry small(.param .u64 a, .param .u64 b, .param .u32 n)
{
    .reg .u64 %a, %b, %at;
    .reg .u32 %n, %i, %v;
    .reg .pred %p, %q;
    .shared .align 16 .u64 kept[4];
    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u32 %n, [n];
"""
WAIT = "griddepcontrol.wait;"


def reach(body: str, a: int = 1, b: int = 1, n: int = 3) -> Reach:
    (kernel,) = load(HEAD + body + "ret; }").values()
    return reach_of(kernel.text, {"a": a, "b": b, "n": n})


def test_reads_and_writes_are_told_apart_by_the_wait() -> None:
    found = reach(
        f"ld.global.u32 %v, [%a+4]; {WAIT} ld.global.u32 %v, [%b]; st.global.u32 [%a], 1;"
    )
    assert found == Reach({"a", "b"}, {"a"}, {"a"}, set())


def test_writes_before_the_wait_are_found() -> None:
    found = reach(f"st.global.u32 [%b], %n; {WAIT} atom.global.add.u32 %v, [%a], 1;")
    assert found == Reach({"a"}, {"a", "b"}, set(), {"b"})


def test_addresses_are_followed_through_arithmetic_and_branches() -> None:
    body = f"""
        mov.u64 %at, %a; setp.lt.u32 %p, %v, 3; @%p mov.u64 %at, %b; mad.wide.u32 %at, %n, 4, %at;
        ld.global.u32 %v, [%at+8]; {WAIT}"""
    assert reach(body).read_before == {"a", "b"}


def test_arguments_decide_branches() -> None:
    body = f"""
        setp.eq.or.u32 %p, %n, 0, %q; @!%p bra late; {WAIT}
        late: ld.global.u32 %v, [%a]; {WAIT}"""
    assert reach(body, n=0).read_before == set()
    assert reach(body, n=1).read_before == {"a"}


def test_what_an_address_of_0_guards_is_left_out() -> None:
    body = f"setp.ne.u64 %p, %b, 0; @%p ld.global.u32 %v, [%b]; {WAIT}"
    assert reach(body, b=0).read_before == set()
    assert reach(body).read_before == {"b"}


def test_short_loops_are_counted() -> None:
    body = f"""
        mov.u32 %i, 0;
        again: add.u32 %i, %i, 1; setp.ne.u32 %p, %i, 2; @%p bra over; {WAIT}
        over: setp.lt.u32 %p, %i, %n; @%p bra again;
        ld.global.u32 %v, [%a];"""
    assert reach(body).read_before == set()
    assert reach(body, n=1).read_before == {"a"}


def test_long_loops_end_and_hide_nothing() -> None:
    body = f"""
        mov.u32 %i, 0;
        again: add.u32 %i, %i, 1; setp.ne.u32 %p, %i, 5000; @%p bra again;
        ld.global.u32 %v, [%a]; {WAIT}"""
    assert reach(body).read_before == {"a"}


def test_addresses_that_are_read_lead_further() -> None:
    assert reach(f"ld.global.u64 %at, [%a]; ld.global.u32 %v, [%at]; {WAIT}").read_before == {
        "a", "*a",
    }  # fmt: skip


def test_addresses_are_followed_through_shared_memory() -> None:
    body = f"""
        mov.u32 %i, kept; again: ld.shared.u64 %at, [%i]; setp.ne.u32 %p, %v, 0;
        @%p ld.global.u32 %v, [%at]; st.shared.u64 [%i+8], %b; @%p bra again; {WAIT}"""
    with pytest.raises(PtxError, match="no parameter"):
        reach(body.replace("st.shared.u64 [%i+8], %b;", ""))
    assert reach(body).read_before == {"b"}


def test_a_successor_that_may_start_before_the_wait_is_told() -> None:
    assert reach(f"griddepcontrol.launch_dependents; {WAIT}").goes_on_before
    assert not reach(f"{WAIT} griddepcontrol.launch_dependents;").goes_on_before
