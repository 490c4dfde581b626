"""What each way of calling this package would run in this process: the node, `MoE` with the
functional API, and models of transformers. Imported once a framework is loaded.

The settings come from the code that the calls themselves use, so the answers cannot differ from
what runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from ..config import ResolvedConfig
from ..engine.select import choose_engine
from ..engine.settings import EngineSettings, Workload
from ..enums import ActivationType, EngineName
from ..errors import SonicMoEError
from ..interop import IS_PADDLE, parse_version
from ..layouts import NATIVE
from ..node.choices import Choices
from .doctor_report import CallState
from .selftest import H, I

NODE, FACE, MODELS = "node", "MoE and the functional API", "transformers"
# The call, and what gives its settings and the engine that they ask for.
_Call = tuple[str, Callable[[], tuple[EngineSettings, EngineName]]]


def calls_on(config: ResolvedConfig, device: str) -> list[CallState]:
    """One entry for each way of calling under `config` on `device`, for bfloat16 tokens, SwiGLU
    without biases, and sizes that every engine takes. Chooses only: compiles and logs nothing.
    """
    with config.activate():
        return [*_states(_of_the_node(config), device), *_of_pytorch(device)]


def _of_the_node(config: ResolvedConfig) -> Iterator[_Call]:
    own = {NODE: config, f'{NODE} with fp8_mode="perf"': config.replace(fp8_mode="perf")}
    for name, settings in own.items():
        choices = Choices(settings, ActivationType.SWIGLU, (), H, I)

        def asked(choices: Choices = choices) -> tuple[EngineSettings, EngineName]:
            resolved, settings = choices.settings()
            return settings, resolved.engine

        yield name, asked


def _of_pytorch(device: str) -> list[CallState]:
    if IS_PADDLE:
        return [CallState(name, None, None, "under PyTorch alone") for name in (FACE, MODELS)]
    # Imported here, because under Paddle there is none of it.
    integration = importlib.import_module("sonicmoe.integrations.transformers")
    use_fp8 = {FACE: None, f"{FACE} with use_fp8=True": True}
    states = list(_states(_planned(use_fp8), device))
    problem = _transformers_problem(integration.MINIMUM_TRANSFORMERS)
    if problem is not None:
        return [*states, CallState(MODELS, None, None, problem)]
    named = {f'{MODELS} "{name}"': fp8 for name, fp8 in integration.IMPLEMENTATIONS.items()}
    return [*states, *_states(_planned(named), device)]


def _planned(use_fp8: dict[str, bool | None]) -> Iterator[_Call]:
    make_plan = importlib.import_module("sonicmoe.functional.call").make_plan
    for name, fp8 in use_fp8.items():

        def asked(fp8: bool | None = fp8) -> tuple[EngineSettings, EngineName]:
            plan = make_plan(ActivationType.SWIGLU, NATIVE, fp8)
            return plan.settings, plan.engine

        yield name, asked


def _states(calls: Iterator[_Call], device: str) -> Iterator[CallState]:
    for name, asked in calls:
        try:
            settings, engine = asked()
            choice = choose_engine(device, engine, Workload(settings, H, I))
        except SonicMoEError as error:
            yield CallState(name, None, None, str(error))
            continue
        recipe = (choice.settings or settings).recipe
        precision = "bfloat16" if recipe is None else f"FP8 ({recipe.name})"
        yield CallState(name, choice.engine.name, precision, choice.reason)


def _transformers_problem(minimum: tuple[int, ...]) -> str | None:
    """Read off the package's metadata: importing transformers takes seconds."""
    needed = ".".join(map(str, minimum))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return f"transformers >= {needed} is not installed"
    too_old = parse_version(found) < minimum
    return f"transformers is {found}; needed: >= {needed}" if too_old else None
