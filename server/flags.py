"""The command line as a table: llama-server's flag names and what they do here.

A flag that has no effect on this build says so when it is given (`no_effect` holds the reason); one
that cannot be honoured at all stops the start (`refused`).  Nothing a user typed is ignored
silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.errors import ConfigError

TRUE_WORDS = ("1", "on", "true", "yes", "enabled")
FALSE_WORDS = ("0", "off", "false", "no", "disabled")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One setting.

    names      every spelling; the first long one is its key
    kind       int, float or str for a value; bool for a switch
    off        spellings that switch it off (llama-server's `--no-...`)
    value      what --help calls the value
    env        environment variable; the command line wins
    choices    allowed values
    many       may be given more than once
    no_effect  accepted and reported: why it changes nothing
    refused    given at all, it stops the start: why
    """

    names: tuple[str, ...]
    kind: type
    help: str
    group: str
    off: tuple[str, ...] = ()
    value: str = "N"
    env: str | None = None
    choices: tuple[str, ...] = ()
    many: bool = False
    no_effect: str | None = None
    refused: str | None = None

    @property
    def key(self) -> str:
        """`ctx_size` for `-c, --ctx-size`: the first long name."""
        long = next(name for name in (*self.names, *self.off) if name.startswith("--"))
        return long[2:].replace("-", "_")


@dataclass(frozen=True)
class Given:
    """A setting somebody made, and how: `--ctx-size` or `LLAMA_ARG_CTX_SIZE`."""

    flag: Flag
    value: object
    source: str


def parse_flags(
    arguments: Sequence[str], flags: Sequence[Flag], environment: Callable[[str], str | None]
) -> dict[str, Given]:
    """What was set, by key; the environment first, then the command line over it.

    Raises: ConfigError naming the flag or variable.
    """
    given = {
        flag.key: Given(flag, _from_environment(flag, text), str(flag.env))
        for flag in flags
        if flag.env is not None and (text := environment(flag.env)) is not None
    }
    spellings = {name: (flag, True) for flag in flags for name in flag.names}
    spellings |= {name: (flag, False) for flag in flags for name in flag.off}
    rest = iter(arguments)
    seen: dict[str, Given] = {}
    for word in rest:
        name, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        if name not in spellings:
            raise ConfigError(f"unknown argument: {word}{_hint(name, spellings)}")
        flag, on = spellings[name]
        if flag.kind is bool:
            if equals:
                raise ConfigError(f"{name} is a switch and takes no value")
            seen[flag.key] = Given(flag, on, name)
            continue
        text = attached if equals else next(rest, None)
        if text is None:
            raise ConfigError(f"{name} needs a value: {flag.value}")
        value = _convert(flag, name, text)
        if flag.many and flag.key in seen:
            earlier = seen[flag.key].value
            value = (*earlier, value) if isinstance(earlier, tuple) else value
        elif flag.many:
            value = (value,)
        seen[flag.key] = Given(flag, value, name)
    return given | seen


def _from_environment(flag: Flag, text: str) -> object:
    source = str(flag.env)
    if flag.kind is not bool:
        value = _convert(flag, source, text)
        return (value,) if flag.many else value
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ConfigError(f"{source} = {text!r}: use one of {', '.join(TRUE_WORDS + FALSE_WORDS)}")


def _convert(flag: Flag, source: str, text: str) -> object:
    if flag.choices and text not in flag.choices:
        raise ConfigError(f"{source} {text}: use one of {', '.join(flag.choices)}")
    try:
        value: object = flag.kind(text)
    except ValueError:
        noun = "a whole number" if flag.kind is int else "a number"
        raise ConfigError(f"{source} {text}: use {noun}") from None
    return value


def _hint(name: str, spellings: Mapping[str, object]) -> str:
    """A likely spelling for a mistyped long flag."""
    import difflib

    close = difflib.get_close_matches(name, spellings, n=1, cutoff=0.8) if len(name) > 3 else []
    return f" (did you mean {close[0]}?)" if close else "; see --help"


def help_text(flags: Sequence[Flag], program: str) -> str:
    """The page of --help: every flag by group."""
    lines = [
        f"usage: {program} [options]",
        "",
        "Serves a GGUF model over HTTP: OpenAI's API and llama-server's own.",
        "Without -m or -hf it serves the bundled demonstration model: tiny, for trying out.",
    ]
    group = ""
    for flag in flags:
        if flag.group != group:
            group = flag.group
            lines += ["", f"{group}:"]
        names = ", ".join((*flag.names, *flag.off))
        value = "" if flag.kind is bool else " " + ("|".join(flag.choices) or flag.value)
        note = f" [accepted; {flag.no_effect}]" if flag.no_effect else ""
        note += f" [refused: {flag.refused}]" if flag.refused else ""
        environment = f" (env: {flag.env})" if flag.env else ""
        lines += [f"  {names}{value}", f"        {flag.help}{environment}{note}"]
    return "\n".join(lines) + "\n"


def completion_script(flags: Sequence[Flag]) -> str:
    """A bash completion of `hotexpert serve` that knows every flag."""
    words = " ".join(name for flag in flags for name in (*flag.names, *flag.off))
    return (
        "_hotexpert() {\n"
        '    [ "${COMP_WORDS[1]}" = serve ] && [ "$COMP_CWORD" -gt 1 ] || return\n'
        f'    COMPREPLY=($(compgen -W "{words}" -- "${{COMP_WORDS[COMP_CWORD]}}"))\n'
        "}\n"
        "complete -o default -F _hotexpert hotexpert\n"
    )
