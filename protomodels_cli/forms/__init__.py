"""The forms of the residual stream, one file each, and the registry that finds them.

Knows nothing of stages, optimizers' arithmetic or the wire. A package elsewhere adds a form with an entry point of the
group `pmtrain.forms` whose name is the form's and whose object is its class.
"""

from protomodels_cli.forms.base import Form, Move, Role, Rule, Sizes, Switch
from protomodels_cli.forms.constrained import Constrained
from protomodels_cli.forms.dense import Dense
from protomodels_cli.forms.reparam import Reparam
from protomodels_cli.forms.two_stream import TwoStream
from protomodels_cli.plugins import Registry


def _is_form(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Form)


FORMS: Registry[type[Form]] = Registry(
    "pmtrain.forms", _is_form, {form.name: form for form in (Reparam, TwoStream, Constrained, Dense)}
)


def form_named(name: str) -> type[Form]:
    return FORMS.get(name)


__all__ = ["FORMS", "Dense", "Form", "Move", "Role", "Rule", "Sizes", "Switch", "form_named"]
