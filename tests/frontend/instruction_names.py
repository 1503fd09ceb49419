"""The instructions that code of this Python can have; run by other interpreters too, so it imports the standard library only.

``python tests/frontend/instruction_names.py`` prints them as JSON.
"""

import dis
import json

MAXIMUM_REAL = 256
"""From this number on they are the compiler's own, which it replaces before code exists."""


def instruction_names() -> list[str]:
    """All but the prefix of long arguments (dis folds it) and those of running code: specialised, instrumented."""
    return sorted(
        name
        for name, number in dis.opmap.items()
        if number < MAXIMUM_REAL and name != "EXTENDED_ARG" and not name.startswith("INSTRUMENTED_")
    )


if __name__ == "__main__":
    print(json.dumps(instruction_names()))
