"""Takes figures: `measure` on a GPU, `machine_code` without one; `evidence` gathers all that a GPU can show.

``python -m benchmarks`` lists the commands of `measure` and `evidence`. Results are JSON below ``results/<gpu>``.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the project
