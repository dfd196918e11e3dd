"""Takes figures: `measure` measures on a GPU, `predict` needs no GPU, `evidence` gathers all that a GPU can show.

``python -m benchmarks`` lists the commands. Results are JSON below ``results/<gpu>``.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the project
