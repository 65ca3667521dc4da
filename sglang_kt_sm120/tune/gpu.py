"""`engine.Bench` on a real GPU: bench times and checks, select says what serves by default."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence

import torch

from sglang_kt_sm120 import bench, devices, env, heuristic, host, limits, op, select
from sglang_kt_sm120.backends import cutlass
from sglang_kt_sm120.tune import sglang_files
from sglang_kt_sm120.tune.contract import Contender, Timing

#: Off SM12x the SM120 lowering's FP8 is emulated: up to here reading the weight still decides.
EMULATED_UP_TO = 16
#: Rows above which each 17th is compared with float64 (GeForce has little of it).
COMPARE_ALL = 512
#: Against float64, for the host's kernels: their own quantisers differ in ties.
HOST_TOLERANCE = 5e-3
FIRST_BUILD = (
    "probing the host's own kernels: building them for the first time takes minutes, which do not "
    "count against the budget"
)


def real_capability(index: int) -> tuple[int, int]:
    """Return the compute capability that kernels of CUDA device `index` are assembled for."""
    return torch.cuda.get_device_capability(index)


def is_stand_in(index: int) -> bool:
    """True where the device is no SM12x: its times say little about one."""
    return real_capability(index) not in select.SM120


def arch_for(index: int, rows: int) -> str | None:
    """Return Triton's `arch` option for a product of `rows`.

    As served on SM12x. Elsewhere the SM120 lowering while it is no bottleneck, then the device's
    own.
    """
    if not is_stand_in(index):
        return devices.arch(index)
    return "sm120" if rows <= EMULATED_UP_TO else None


def arch_of_variant(index: int, config: heuristic.Config) -> str | None:
    """Return the option for a variant: tiles of 32 rows and more belong to larger M."""
    return arch_for(index, config.block_m)


def device(index: int) -> select.Device:
    """Return the facts to tune for: a stand-in's own limits, whatever a test presents it as."""
    facts = devices.device(index)
    if is_stand_in(index):
        facts = dataclasses.replace(facts, capability=real_capability(index), mma="plain")
    return facts


class GpuBench:
    """Times contenders on CUDA device `index`.

    Args:
        index: The device; it must be current.
        dtype: Of activations and output.
        say: Receives a line before something that may take minutes.
    """

    def __init__(
        self, index: int, dtype: torch.dtype, say: Callable[[str], None] = lambda text: None
    ):
        self.index, self.dtype, self.say = index, dtype, say
        self.waited = 0.0
        self.device = device(index)
        self.pdl = env.PDL.get()
        self._case: bench.Case | None = None
        self._said = False
        # Older torch collects garbage before each capture: not through all of torch and Triton.
        gc.freeze()

    def time(
        self,
        shape,
        m: int,
        contenders: Sequence[Contender],
        *,
        rounds: int,
        graph_us: float,
        fresh: bool = False,
    ) -> list[Timing]:
        """See `engine.Bench`: wrong ones are not timed, and each is checked again afterwards."""
        case = self._operands(shape, m, fresh)
        listed = [self._candidate(c, m, f"{i}") for i, c in enumerate(contenders)]
        records = bench.time_case(case, listed, rounds=rounds, graph_us=graph_us)
        return [Timing(record.us, record.error, record.note) for record in records]

    def defaults(self, shape, m: int) -> list[Contender]:
        """See `engine.Bench`: what `select.choose` answers when it asks no table."""
        known = self._known(shape.n, shape.k)
        problem = op.problem_of(m, shape.n, shape.k, self.dtype)
        asked_for = dataclasses.replace(known, host_default="")  # no default of the host's is left
        choices = (
            select.choose(problem, self.device, facts, tables=False) for facts in (known, asked_for)
        )
        return list(dict.fromkeys(Contender(c.backend, c.config) for c in choices))

    def others(self, shape, m: int) -> list[Contender]:
        """See `engine.Bench`: the host's CUTLASS kernels that are right on this shape."""
        names = self._known(shape.n, shape.k).proven
        return [Contender("cutlass", limits.Cutlass(name)) for name in names]

    @functools.cache  # noqa: B019 (one per run)
    def _known(self, n: int, k: int) -> limits.Known:
        if is_stand_in(self.index):
            return select.NOTHING_KNOWN  # none of them is built for it
        start = time.monotonic()
        try:
            host.offer_cutlass()
            self._announce(n, k)
            where = torch.device("cuda", self.index)
            return op.prove_cutlass(where, n, k, self.dtype, every=True)
        finally:
            self.waited += time.monotonic() - start

    def _announce(self, n: int, k: int) -> None:
        """Say once what may take minutes, where a kernel of the host's is built when it is used."""
        usable = select.usable_kernels(op.problem_of(1, n, k, self.dtype), self.device)
        if not self._said and any(map(cutlass.is_built_at_use, usable)):
            self._said = True
            self.say(FIRST_BUILD)

    def _operands(self, shape, m: int, fresh: bool) -> bench.Case:
        """Return the product to time; fresh operands where asked for or where it is another one."""
        case = self._case
        if fresh or case is None or (case.n, case.k, case.m) != (shape.n, shape.k, m):
            self._case = case = None  # before more memory is taken
            where = torch.device("cuda", self.index)
            case = next(iter(bench.make_cases([shape], [m], where, self.dtype)))
            # As many counters as a served layer has.
            case.counters = op.counters_for(shape.n, shape.k, where)[0]
            case.every = 1 if m <= COMPARE_ALL else 17
            self._case = case
        return case

    def _candidate(self, contender: Contender, m: int, name: str) -> bench.Candidate:
        if contender.backend == "triton":
            arch = arch_for(self.index, m)
            return bench.ours(
                self.device, config=contender.config, name=name, arch=arch, pdl=self.pdl
            )

        if contender.backend == "stock":
            return bench.Candidate(name, self._stock(contender.config), tolerance=1e-2)

        def prepare(case: bench.Case) -> Callable[[int], torch.Tensor]:
            options = {"arch": devices.arch(self.index), "pdl": self.pdl}
            product = cutlass.plan(contender.config, case.n, case.k, **options)

            def call(index: int) -> torch.Tensor:
                weight, scale = case.weights[index], case.scales[index]
                return product(case.x, weight, scale, None, case.x.dtype, contender.config, None)

            return call

        return bench.Candidate(name, prepare, tolerance=HOST_TOLERANCE)

    def _stock(self, config: sglang_files.Stock) -> Callable:
        """Return `prepare` for sglang's own Triton linear, launched with `config`."""
        function, _ = host.linear_functions()["stock"]
        plain = bench.host_linear("stock", function)

        def prepare(case: bench.Case) -> Callable[[int], torch.Tensor]:
            call = plain.prepare(case)

            def configured(index: int) -> torch.Tensor:
                with sglang_files.launched_with(function, config.as_dict()):
                    return call(index)

            return configured

        return prepare
