"""What each way of calling this package would run in this process: the node, `MoE` with the
functional API, and models of transformers. Imported once a framework is loaded.

The settings come from the code that the calls themselves use, so the answers cannot differ from
what runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
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
# What a call asks for: its settings, and the engine.
_Asked = Callable[[], tuple[EngineSettings, EngineName]]


def calls_on(config: ResolvedConfig, device: str) -> list[CallState]:
    """One entry for each way of calling under `config` on `device`, for bfloat16 tokens, SwiGLU
    without biases, and sizes that every engine takes. Chooses only: compiles and logs nothing.
    """
    calls: dict[str, _Asked] = {
        NODE: partial(_of_node, config),
        f'{NODE} with fp8_mode="perf"': partial(_of_node, config.replace(fp8_mode="perf")),
    }
    # The ways that cannot be taken here at all, whatever engine there is.
    closed: dict[str, str] = {}
    if IS_PADDLE:
        closed = dict.fromkeys((FACE, MODELS), "under PyTorch alone")
    else:
        calls |= {
            FACE: partial(_of_face, None),
            f"{FACE} with use_fp8=True": partial(_of_face, True),
        }
        # Imported here, because under Paddle there is none of it.
        integration = importlib.import_module("sonicmoe.integrations.transformers")
        problem = _transformers_problem(integration.MINIMUM_TRANSFORMERS)
        if problem is not None:
            closed = {MODELS: problem}
        else:
            named = integration.IMPLEMENTATIONS.items()
            calls |= {f'{MODELS} "{name}"': partial(_of_face, fp8) for name, fp8 in named}
    with config.activate():
        states = [_state(name, asked, device) for name, asked in calls.items()]
    return [*states, *(CallState(name, None, None, reason) for name, reason in closed.items())]


def _of_node(config: ResolvedConfig) -> tuple[EngineSettings, EngineName]:
    resolved, settings = Choices(config, ActivationType.SWIGLU, (), H, I).settings()
    return settings, resolved.engine


def _of_face(use_fp8: bool | None) -> tuple[EngineSettings, EngineName]:
    # Under Paddle there is no functional face to import.
    call = importlib.import_module("sonicmoe.functional.call")
    plan = call.make_plan(ActivationType.SWIGLU, NATIVE, use_fp8)
    return plan.settings, plan.engine


def _state(name: str, asked: _Asked, device: str) -> CallState:
    try:
        settings, engine = asked()
        choice = choose_engine(device, engine, Workload(settings, H, I))
    except SonicMoEError as error:
        return CallState(name, None, None, str(error))
    recipe = (choice.settings or settings).recipe
    precision = "bfloat16" if recipe is None else f"FP8 ({recipe.name})"
    return CallState(name, choice.engine.name, precision, choice.reason)


def _transformers_problem(minimum: tuple[int, ...]) -> str | None:
    """Read off the package's metadata: importing transformers takes seconds."""
    needed = ".".join(map(str, minimum))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return f"transformers >= {needed} is not installed"
    too_old = parse_version(found) < minimum
    return f"transformers is {found}; needed: >= {needed}" if too_old else None
