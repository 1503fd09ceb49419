from dovetail import aot as aot
from dovetail import backends as backends
from dovetail import distributed as distributed
from dovetail import errors as errors
from dovetail import testing as testing
from dovetail.aot.joint_graph import JointGraph as JointGraph
from dovetail.artefacts.load import load as load
from dovetail.backends import register_backend as register_backend
from dovetail.backends.debug.compare import compare as compare
from dovetail.backends.foreign.torch_compile import torch_backend as torch_backend
from dovetail.backward_capture.block import compiled_autograd as compiled_autograd
from dovetail.face.compile import capture as capture
from dovetail.options import Options as Options
from dovetail.reports.explanation import events_of as events_of
from dovetail.reports.explanation import explain as explain
from dovetail.reports.write import report as report
from dovetail.surface.backends import list_backends as list_backends
from dovetail.surface.compile import compile as compile
from dovetail.switches.disabled import disable as disable
from dovetail.switches.logs import set_logs as set_logs
from dovetail.switches.resets import reset as reset
from dovetail.switches.stances import set_stance as set_stance
from dovetail.tiers.swap import wait as wait
from dovetail.trace import mark_dynamic as mark_dynamic
from dovetail.versions import __version__ as __version__

__all__: list[str]
