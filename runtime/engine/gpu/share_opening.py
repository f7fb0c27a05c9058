"""ShareOpening: one GPU's memory, kernels and graphs, in the order in which they come to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from ops.gpu.expert import ADDRESSES
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, slot_bytes
from runtime.cuda.module import CubinCache
from runtime.cuda.stream import Stream
from runtime.engine.gpu.captured_steps import CapturedSteps, Needs, needs_of
from runtime.engine.gpu.choice_launches import WORDS_BYTES
from runtime.engine.gpu.control import ControlRing
from runtime.engine.gpu.expert_plan import ExpertPlan
from runtime.engine.gpu.experts import ExpertStore, ResidentExperts
from runtime.engine.gpu.functions import Functions
from runtime.engine.gpu.kv import PageMemory
from runtime.engine.gpu.links import Links
from runtime.engine.gpu.plan_parts import Mailboxes, RowSource, StepMemory
from runtime.engine.gpu.results import Results
from runtime.engine.gpu.sampling_launches import DEVICE_CHOSEN_BYTES
from runtime.engine.gpu.share_plan import SharePlan, runs_overlapped
from runtime.engine.gpu.state_slots import StateMemory
from runtime.engine.gpu.step_graph import StepPlanner
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.gpu.transfer import Refused, Transfer, flat, transfer_all
from runtime.engine.gpu.weights import WeightMemory
from runtime.notices import Reason

FIRST_EPOCH = 1


class ShareOpening:
    """`open_dense`, `join`, `load_dense`, `hold`, `open_kernels`, `plan`, `assemble`, `capture`, in
    this order; `load_experts` after `hold`.

    planned      what it is to hold
    expert_plan  which experts it is to hold, then which it does
    links        None: this GPU has the whole model
    expert_room  bytes that are left for experts
    first_row    of this GPU's rows in the table of experts of all of them
    """

    stream: Stream
    weights: WeightMemory
    pages: PageMemory
    experts: ExpertStore
    functions: Functions
    needs: Needs
    room: DeviceBuffer
    memory: StepMemory

    def __init__(
        self,
        planned: SharePlan,
        expert_plan: ExpertPlan,
        device: Device,
        resources: ExitStack,
    ) -> None:
        self.planned, self.share, self.device = planned, planned.share, device
        self.model, self.expert_plan = planned.share.model, expert_plan
        self._own = resources.callback
        self.overlapped = runs_overlapped(planned.gpu)
        self.states: StateMemory | None = None
        self.expert_room = planned.expert_room
        self.first_row = 0
        self._ends = planned.ends

    @property
    def n_rows(self) -> int:
        """Rows of the table of this GPU's experts."""
        spec = self.model.spec
        return len(spec.layers) * max(spec.n_expert_max, 1)

    def open_dense(self) -> None:
        """Memory of the dense weights, of states, and of the pages, which are cleared.

        Raises: OutOfDeviceMemory, CudaError.
        """
        planned, share = self.planned, self.share
        self.weights = WeightMemory(
            self.device, self.model, embeds=share.embeds, outputs=share.outputs
        )
        self._own(self.weights.close)
        self.pages = PageMemory(self.device, planned.pages.sizes, planned.pages.n_pages)
        self._own(self.pages.close)
        self.stream = Stream(self.device, "steps")
        self._own(self.stream.close)
        self.pages.clear(self.stream)
        self.stream.synchronize()
        if planned.states is not None:
            states = planned.states
            self.states = StateMemory(self.device, states.sizes, states.n_slots)
            self._own(self.states.close)

    def join(self, links: Links, index: int) -> None:
        """Take the residual stream from the GPU before, give it to the next."""
        before, behind = links.between[index - 1 : index], links.between[index : index + 1]
        self._ends = replace(
            self._ends,
            taking=before[0].taking() if before else None,
            giving=behind[0].giving() if behind else None,
            tokens=links.tokens() if index == 0 else None,
        )

    def shrink(self) -> None:
        """Leave less for experts where others have taken the GPU's memory since it was looked at.

        Raises: CudaError.
        """
        left = self.device.free_bytes() - self.planned.activation_bytes
        if left >= self.expert_room or not self.model.spec.n_expert_max:
            return
        self.expert_room = max(left - self.planned.settings.reserve_bytes, 0)
        self.planned.settings.notices.add(
            Reason.SHRUNK,
            f"another process took memory of {self.device.info.name} meanwhile: "
            f"{self.expert_room / 2**30:.1f} GiB are left for experts",
        )

    def hold(self, experts: ExpertStore | None) -> None:
        """Keep these experts; None: all of them.  Raises: OutOfDeviceMemory, CudaError."""
        self.experts = ResidentExperts(self.device, self.model) if experts is None else experts
        self._own(self.experts.close)

    def load_dense(self, moved: Callable[[int], None]) -> None:
        """Move all but the experts to the GPU.

        Raises: PinningFailed, CudaError; what `moved` raises.
        """
        self._tell_refused(self.weights.load(moved))

    def load_experts(self, moved: Callable[[int], None]) -> None:
        """Move those experts to the GPU that it is to hold; raises the same."""
        self._tell_refused(self.experts.load(moved))

    def _tell_refused(self, refused: Refused) -> None:
        notices, name = self.planned.settings.notices, self.device.info.name
        if refused.pages_bytes:
            notices.add(
                Reason.UNPINNED,
                f"{refused.pages_bytes / 2**30:.1f} GiB of weights went to {name} by way of "
                "buffers, slower: the driver would not register the file's pages",
            )
        if refused.batches:
            notices.add(Reason.SLOW_UPLOADS, refused.batches)

    def plan(
        self,
        mailboxes: Mailboxes | None,
        rows: RowSource | None,
        max_deltas: int,
        shapes: list[StepShape],
    ) -> None:
        """What its graphs will take."""
        self.planner = self._planner(mailboxes, rows, max_deltas)
        self.needs = needs_of(self.planner, shapes)
        for text in sorted(self.needs.slow_prompts):
            self.planned.settings.notices.add(Reason.SLOW_PROMPTS, text)

    def open_kernels(self, cache: CubinCache) -> None:
        """Where kernels are loaded; none is yet."""
        self.functions = Functions(self.device, cache)
        self._own(self.functions.close)

    def assemble(self, assembled: Callable[[], object]) -> None:
        """Load the kernels.  Raises: PtxCompileError, CudaError."""
        self.functions.load(self.needs.kernels.values(), assembled)

    def capture(
        self,
        ring: ControlRing,
        results: Results,
        tables: Sequence[int],
        done: int | None,
        first_choice: int | None,
    ) -> CapturedSteps:
        """Room for its graphs, which are captured when they are needed.

        tables        rows of each GPU's table of experts, this one's among them at first_row
        done          address of the u32 that gets a step's number at its end; None: that of results
        first_choice  where the choices of its layers' experts begin among all; None: nobody wants
                      them
        Raises: OutOfDeviceMemory, CudaError.
        """
        self.room = DeviceBuffer(self.device, self.needs.room_bytes, "activations")
        self._own(self.room.close)
        memory = self.memory = self._memory(ring, results, tables, done, first_choice or 0)
        steps = CapturedSteps(
            self.device, self.planner, self.functions, memory, ring, self.room, first_choice
        )
        self._own(steps.close)
        return steps

    def facts(self) -> dict[str, object]:
        """What this GPU is and holds."""
        info = self.device.info
        return {
            "gpu": info.name,
            "architecture": info.architecture,
            "overlapped_launches": self.overlapped,
            "weights_bytes": self.weights.n_bytes,
            "activation_bytes": self.room.nbytes,
            "kernels": len(self.functions),
        }

    def _planner(
        self, mailboxes: Mailboxes | None, rows: RowSource | None, max_deltas: int
    ) -> StepPlanner:
        return StepPlanner(
            self.model,
            self.weights,
            self.pages,
            mailboxes=mailboxes,
            rows=rows,
            fetches=None if mailboxes is None else self.experts.fetches,
            max_deltas=max_deltas,
            states=self.states,
            ends=self._ends,
            overlapped=self.overlapped,
        )

    def _memory(
        self,
        ring: ControlRing,
        results: Results,
        tables: Sequence[int],
        done: int | None,
        first_choice: int,
    ) -> StepMemory:
        """The memory that all graphs share, with its first contents."""
        table = np.zeros((sum(tables), ADDRESSES), np.uint64)
        own = self.experts.table().reshape(-1, ADDRESSES)
        table[self.first_row :][: self.n_rows] = own
        words = np.array([FIRST_EPOCH, 0], np.uint32)
        control_bytes = self.needs.control_bytes
        parts = (
            slot_bytes(control_bytes),
            slot_bytes(words.nbytes),
            slot_bytes(WORDS_BYTES),
            DEVICE_CHOSEN_BYTES,
        )
        state = DeviceBuffer(self.device, sum(parts) + slot_bytes(table.nbytes), "step state")
        self._own(state.close)
        control = state.address
        epoch = control + parts[0]
        handed = epoch + parts[1]
        chosen = handed + parts[2]
        table_at = chosen + parts[3]
        transfers = [
            Transfer(control, np.zeros(control_bytes, np.uint8)),
            Transfer(epoch, flat(words)),
            Transfer(handed, np.zeros(WORDS_BYTES, np.uint8)),
            Transfer(chosen, np.zeros(DEVICE_CHOSEN_BYTES, np.uint8)),
            Transfer(table_at, flat(table)),
        ]
        transfer_all(self.device, transfers)
        shift = results.shift_on(self.device)
        return StepMemory(
            control=control,
            table=table_at + 8 * ADDRESSES * self.first_row,
            first_row=self.first_row,
            epoch=epoch,
            counter=epoch + 4,
            words=handed,
            ring=ring.address_on(self.device),
            ring_stride=ring.stride,
            logits=results.logits_address + shift,
            flags=results.flags_address + shift,
            choices=results.choices_address + shift + 4 * first_choice,
            choices_stride=results.choices_stride,
            done=results.done_address + shift if done is None else done,
            results_done=results.done_address + shift,
            chosen=chosen,
            host_chosen=results.chosen_address + shift,
        )
