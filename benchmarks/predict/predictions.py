"""The JSON of predictions, which no run on a GPU has confirmed: its schema, and the only code that reads and writes it.

    {"schema": 1, "prediction": true, "date": …, "commit": …, "machines": [{…}], "kernels": [{…}],
     "cases": [{"prediction": true, "machine": "H200", "benchmark": "decode", "case": {…},
                "implementation": "fastattn triton", "seconds": …, "resource": "device memory", "kernels": {…}}]}

``case`` and ``implementation`` are those of a row of the results, so that one finds the other.
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
    """The document, checked. Raises ``ValueError``; a document that does not call itself a prediction is none."""
    if not isinstance(document, dict) or document.keys() != _TOP or document["schema"] != SCHEMA:
        raise ValueError(f"predictions: expected a document of schema {SCHEMA} with {sorted(_TOP)}")
    if document["prediction"] is not True:
        raise ValueError("predictions: the document is not marked as a prediction")
    for index, case in enumerate(document["cases"]):
        if not isinstance(case, dict) or case.keys() != _CASE or case["prediction"] is not True:
            raise ValueError(f"predictions.cases[{index}]: expected a prediction with {sorted(_CASE)}")
    return document


def write(document: Predictions, path: Path) -> Path:
    """Writes the checked document to ``path``, or to ``predictions.json`` in it where it is a folder."""
    validate(document)
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        path = path / "predictions.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read(path: Path) -> Predictions:
    """The checked document of a file, or of ``predictions.json`` in a folder."""
    return validate(json.loads((path if path.suffix == ".json" else path / "predictions.json").read_text()))


def seconds_of(document: Predictions, gpu: str, benchmark: str, case: Any, implementation: str) -> float | None:
    """What was predicted for a row of the results of ``gpu`` (``"NVIDIA H200"``), if it was."""
    for each in document["cases"]:
        is_same = each["benchmark"] == benchmark and each["implementation"] == implementation and each["case"] == case
        if is_same and each["machine"] in gpu.split():
            return float(each["seconds"])
    return None
