"""Defines the schema of the JSON of predictions, which no GPU has confirmed, and is the only code to read or write it.

    {"schema": 1, "prediction": true, "date": …, "commit": …, "machines": [{…}], "kernels": [{…}],
     "cases": [{"prediction": true, "machine": "H200", "benchmark": "decode", "case": {…},
                "implementation": "fastattn triton", "seconds": …, "resource": "device memory", "kernels": {…}}]}

``case`` and ``implementation`` equal those of a row of the results, so that the row's prediction can be found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = 1
_CASE = {"prediction", "machine", "benchmark", "case", "implementation", "seconds", "resource", "kernels"}
_TOP = {"schema", "prediction", "date", "commit", "machines", "kernels", "cases"}

Predictions = dict[str, Any]


def validate(document: Any) -> Predictions:
    """Returns the document. Raises ``ValueError`` if it breaks the schema or is not marked as a prediction."""
    if not isinstance(document, dict) or document.keys() != _TOP or document["schema"] != SCHEMA:
        raise ValueError(f"predictions: expected a document of schema {SCHEMA} with {sorted(_TOP)}")
    if document["prediction"] is not True:
        raise ValueError("predictions: the document is not marked as a prediction")
    for index, case in enumerate(document["cases"]):
        if not isinstance(case, dict) or case.keys() != _CASE or case["prediction"] is not True:
            raise ValueError(f"predictions.cases[{index}]: expected a prediction with {sorted(_CASE)}")
    return document


def write(document: Predictions, path: Path) -> Path:
    """Checks the document and writes it to ``path``, or if it is a folder, to ``predictions.json`` in it.

    Returns the path of the file.
    """
    validate(document)
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        path = path / "predictions.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read(path: Path) -> Predictions:
    """Returns the checked document in a file, or in the ``predictions.json`` of a folder."""
    return validate(json.loads((path if path.suffix == ".json" else path / "predictions.json").read_text()))


def seconds_of(document: Predictions, gpu: str, benchmark: str, case: Any, implementation: str) -> float | None:
    """Returns the seconds predicted for a row of the results of ``gpu`` (``"NVIDIA H200"``), or None."""
    for each in document["cases"]:
        is_same = each["benchmark"] == benchmark and each["implementation"] == implementation and each["case"] == case
        if is_same and each["machine"] in gpu.split():
            return float(each["seconds"])
    return None
