"""The policy server: a small OpenAI-compatible server that swaps adapters under load.

It is the embedded default; vLLM takes its place where there is a GPU to fill. How the parts
fit::

    api (FastAPI) ──submit──► engine (one generation thread) ──forward──► adapters (table)
                                                                             ▲
                              watcher (model.versions) ──load, move alias────┘

- A request is *admitted* when it is submitted: it is bound there to one immutable version,
  and every token of its reply is drawn by that version.
- Only the generation thread runs forwards. Adapters are loaded beside it, and nothing that a
  running forward reads is ever switched.
"""

from learner.serving.adapters import AdapterTable, Binding, PolicyVersion
from learner.serving.api import build_app
from learner.serving.engine import Engine, GenerationRequest, Progress, SampledToken, Ticket
from learner.serving.metrics import ServeMetrics
from learner.serving.sampling import SamplingParameters
from learner.serving.watcher import VersionLog, VersionWatcher

__all__ = [
    "AdapterTable",
    "Binding",
    "Engine",
    "GenerationRequest",
    "PolicyVersion",
    "Progress",
    "SampledToken",
    "SamplingParameters",
    "ServeMetrics",
    "Ticket",
    "VersionLog",
    "VersionWatcher",
    "build_app",
]
