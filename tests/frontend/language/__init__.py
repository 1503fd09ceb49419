"""Small programs over the whole Python language. They need no torch: ``x`` is a tensor or a plain number.

:data:`CASES` is used by test_language.py (compiled against eager) and by machine_language.py (the frame machine against Python
itself, on interpreters that may have no torch).
"""

from tests.frontend.language import classes, exceptions, expressions, functions, generators, library, newer
from tests.frontend.language.cases import CASES, Case, plain

MODULES = (generators, exceptions, expressions, functions, classes, library, newer)

__all__ = ["CASES", "MODULES", "Case", "plain"]
