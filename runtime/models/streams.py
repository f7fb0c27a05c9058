"""Streams: models whose residual is several rows, from which each block's input is mixed.

A token's residual is r[n_stream][n_embd], at the start that many copies of its embedding.  Every
block has a mix of its own: what it reads of the streams, and how its result y returns to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.models.linear import Linear


@dataclass(frozen=True)
class GatedStreams:
    """A mean of normed streams, each value gated.

    n = rms_norm of each stream, the block's norm being f32[n_stream][n_embd]; f = all n in a row
    input = mean over streams of n * sigmoid(up(silu(down(f) / n_stream)))
    r[s] += 2 * sigmoid(inject(f)[s] / n_stream) * y

    inject  None: of the output, which nothing follows
    """

    down: Linear
    up: Linear
    inject: Linear | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.down, self.up, *(() if self.inject is None else (self.inject,)))

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        return ()


@dataclass(frozen=True)
class SinkhornStreams:
    """Streams that a nearly doubly stochastic matrix mixes.

    m = mix(all streams in a row, RMS-normed without a weight); with its n_stream, n_stream and
    n_stream^2 values, scale f32[3] and base f32 of as many values as m:
    pre = sigmoid(m[first] * scale[0] + base) + epsilon
    post = 2 * sigmoid(m[second] * scale[1] + base)
    C[from][to] = softmax over `to` of (m[third] * scale[2] + base) + epsilon, then divided by
    (sum over `from` + epsilon), and after that n_iterations - 1 times by (sum over `to` + epsilon)
    and by (sum over `from` + epsilon)
    input = rms_norm(sum of pre[s] * r[s]);  r[to] = post[to] * y + sum of C[from][to] * r[from]
    """

    mix: Linear
    base: str
    scale: str
    n_iterations: int
    epsilon: float

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.mix,)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        return (self.base, self.scale)


@dataclass(frozen=True)
class MeanStreams:
    """rms_norm(mean of the streams): what an output reads."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        return ()


Streams = GatedStreams | SinkhornStreams | MeanStreams
