"""The run spec: one YAML file that says everything about a run. Knows nothing of torch, sockets or disks."""

from protomodels_cli.spec.errors import Problem, SpecError
from protomodels_cli.spec.load import load_spec, parse_spec, spec_from
from protomodels_cli.spec.schema import RunSpec

__all__ = ["Problem", "RunSpec", "SpecError", "load_spec", "parse_spec", "spec_from"]
