"""The stages of ahead-of-time autograd: create a state, capture the joint graph, compile or export it."""

from dovetail.aot.capture_joint import capture_joint
from dovetail.aot.compile_joint import CompiledGraph, compile_joint
from dovetail.aot.joint_graph import JointGraph
from dovetail.aot.state import AOTState, create_state
from dovetail.artefacts.export import export_joint

__all__ = ["AOTState", "CompiledGraph", "JointGraph", "capture_joint", "compile_joint", "create_state", "export_joint"]
