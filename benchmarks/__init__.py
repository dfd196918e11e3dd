"""Measures kernels on a GPU (`measure`), inspects them without one (`machine_code`), runs the GPU check (`evidence`).

``python -m benchmarks`` lists the commands of `measure` and `evidence`. Results are JSON files in ``results/<gpu>``.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the repository
