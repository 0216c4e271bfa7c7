"""Which checkpoint a run goes on from: chosen by its manifest and the sizes of its files, and proved by loading it.

DCP itself loads torn directories and flipped bits without an error. Knows the store; not what is loaded into.
"""

import dataclasses
from pathlib import Path

import torch
from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.api import CheckpointException

from llama405b.checkpoint.digests import Fault, PassedOver
from llama405b.checkpoint.gather import Gathered
from llama405b.checkpoint.snapshot import restore, restore_weights
from llama405b.checkpoint.store import CheckpointView, Store
from llama405b.checkpoint.unpickling import UnsafeError
from llama405b.checkpoint.verified import DamagedError, VerifiedReader
from llama405b.contract.checkpoints import named_path, refuse_held, step_of
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted, reason_of
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import Progress
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater


class Resume:
    """What ``--resume`` (no, auto, a step, a path) asks for; all ranks call it alike."""

    def __init__(self, store: Store, wanted: str, *, weights_only: bool = False) -> None:
        """Choose. ``weights_only``: to look at a checkpoint's weights, not to go on from there: nothing is set aside.

        Raises:
            UserError: A named checkpoint is missing or incomplete; ``auto`` finds checkpoints but none that is complete, or
            a newer one cannot be read, or none where this run has saved some; or the directory holds checkpoints of another run.
        """
        self.store = store
        self.wanted = wanted
        self.weights_only = weights_only
        self.found: CheckpointView | None = None
        self.passed_over: list[PassedOver] = []
        self.untried = store.present()  # the newest last
        self.n_present = len(self.untried)
        if wanted == "no":
            refuse_held(store.root, self.untried)
        elif wanted == "auto":
            self._choose_newest()
        else:
            self._choose_named()

    def load(self, model: torch.nn.Module, updater: Updater, me: Rank, progress: Progress) -> int:
        """Load what was found into the shards; returns its step. All that is not used is set aside.

        Raises:
            DamagedError: A part of it is not what was saved: the shards are as they may be, and ``found`` is now the same without
                that file, if another host has a copy, or an older one.
            UserError: There is none, it cannot be read, or it holds what no checkpoint does.
        """
        assert self.found
        gathered = Gathered(self.store, self.found, progress)
        try:
            gathered.describe()
            reader = GatheringReader(gathered, progress)
            with collectives.raise_on_all_ranks():
                reader.read_metadata()
            load = restore_weights if self.weights_only else restore
            done = load(self.found.path, model, updater, me, reader)
        except CheckpointException as failed:
            _refuse_unsafe(failed)
            fault = _fault(self.found, failed, self.store.hosts)
            if fault.fault is Fault.DAMAGED and self._leave_out(gathered, failed):
                raise DamagedError(f"{fault}; loading its copy instead") from None
            self._reject(fault)
            raise DamagedError(f"{fault}; loading {self.found.path} instead") from None
        finally:
            gathered.drop()
        self.settle()
        return done

    @property
    def _another(self) -> str:
        """What to do instead of the named one."""
        return "use another one" if self.weights_only else "use another one, or auto"

    def _leave_out(self, gathered: Gathered, failed: CheckpointException) -> bool:
        """Do without the files that turned out to be damaged, if other hosts have copies of them."""
        assert self.found
        local = list(self.found.local)
        available = list(self.found.available)
        owner_of = self.store.owner_of
        for rank, cause in failed.failures.items():
            assert isinstance(cause[0], DamagedError)
            file, owner = cause[0].file, owner_of[rank]
            sender = gathered.sent_by.get((file, owner), owner)
            for other in [other for other, its in enumerate(owner_of) if its == sender]:
                local[other] = local[other] - {file}
                available[other] = available[other] - {file}
        if {*self.found.manifest.files} - set().union(*available):
            return False
        self.found = dataclasses.replace(self.found, local=tuple(local), available=tuple(available))
        return True

    def settle(self) -> None:
        """Rename what was passed over, so that ``auto`` does not find it."""
        self.store.set_aside([each.path for each in self.passed_over])

    def _choose_named(self) -> None:
        """The requested checkpoint; later ones are set aside, unless they belong to another run."""
        root = self.store.root
        path = named_path(root, self.wanted)
        found = self.store.look_at(path)
        if isinstance(found, PassedOver):
            raise UserError(f"--resume: {found}; {self._another}")
        later = [each for each in self.untried if step_of(each) > step_of(path)]
        if self.weights_only:
            later = []
        if later and path.parent.resolve() != root.resolve():
            raise UserError(
                f"--checkpoint.dir: {root} holds checkpoints up to {later[-1].name}, of another run; use another directory"
            )
        self.found = found
        self.passed_over = [PassedOver(old, Fault.LATER, f"{old}: saved after {path.name}") for old in later]

    def _choose_newest(self) -> None:
        """The newest that looks complete; one that may be intact is an error."""
        self.found = None
        while self.untried and not self.found:
            looked = self.store.look_at(self.untried.pop())
            if isinstance(looked, CheckpointView):
                self.found = looked
            else:
                self._pass_over(looked)
        known = [path for path in self.store.saved if Path(path).parent == self.store.root]
        if known and not self.n_present:
            raise UserError(
                f"--resume auto: {self.store.root} is empty, but this run saved {Path(max(known)).name} there; is its filesystem "
                "mounted? To start from the model's weights, use another --run"
            )
        if self.passed_over and not self.found:
            raise UserError(
                f"--resume auto: {self.store.root} has {counted(self.n_present, 'checkpoint')}, but none verifies "
                f"({'; '.join(map(str, self.passed_over))}); to start from the model's weights, use another --checkpoint.dir"
            )

    def _pass_over(self, fault: PassedOver) -> None:
        if fault.fault is Fault.UNREADABLE:
            raise UserError(
                f"--resume auto: {fault}; it may be intact: make it readable, or go back to an earlier step with --resume STEP"
            )
        self.passed_over.append(fault)

    def _reject(self, fault: PassedOver) -> None:
        """Go on to an older checkpoint, if any will do."""
        if self.wanted != "auto":
            raise UserError(f"--resume: {fault}; {self._another}")
        self._pass_over(fault)
        self._choose_newest()


class GatheringReader(VerifiedReader):
    """Brings the files that this rank turns out to need."""

    def __init__(self, gathered: Gathered, told: Progress) -> None:
        super().__init__(gathered.path, gathered.found.manifest)
        self.gathered, self.told = gathered, told

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """DCP calls this on all ranks, with what each will read."""
        self.gathered.bring(self.storage_data[item.storage_index].relative_path for item in plan.items)
        self.path = self.gathered.path
        return super().prepare_local_plan(plan)


def _refuse_unsafe(failed: CheckpointException) -> None:
    """Have every rank refuse what one found that should not be there: nobody goes on to an older one from that unseen."""
    for _, (cause, _) in sorted(failed.failures.items()):
        if isinstance(cause, UnsafeError):
            raise UserError(str(cause)) from None


def _fault(found: CheckpointView, failed: CheckpointException, hosts: tuple[str, ...]) -> PassedOver:
    """Return why a checkpoint could not be loaded; a disk that could not be read comes first."""
    causes = {rank: cause[0] for rank, cause in sorted(failed.failures.items())}
    for rank, cause in causes.items():
        if not isinstance(cause, DamagedError):
            why = f"{found.path}: cannot be read ({reason_of(cause)}) on {hosts[rank]}"
            return PassedOver(found.path, Fault.UNREADABLE, why)
    return PassedOver(found.path, Fault.DAMAGED, str(next(iter(causes.values()))))
