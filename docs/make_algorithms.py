"""Writes the table and the pictures of docs/algorithms.md from the losses themselves.

python docs/make_algorithms.py            # writes docs/algorithms.md (between its marks) and docs/loss_weights.png
python docs/make_algorithms.py --check    # exit 1 where the table is out of date

A loss's weight is what it multiplies A * d log pi by, as a function of the ratio: it is measured, by giving the
function in gspo_megatron/algorithm one sequence whose tokens have that ratio, and taking its gradient. Relative to the
gradient at ratio 1, so that losses of different aggregation share an axis.
"""

import argparse
import dataclasses
import inspect
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gspo_megatron.algorithm.losses import LOSSES, from_lists  # noqa: E402
from gspo_megatron.algorithm_config import LossConfig  # noqa: E402

PAGE, PICTURE = ROOT / "docs" / "algorithms.md", ROOT / "docs" / "loss_weights.png"
START, END = "<!-- table: written by docs/make_algorithms.py -->", "<!-- end of the table -->"
LENGTH = 8
"""Tokens of the sequence that is drawn; matters to luspo, fspo, vespo and ctpo only."""
NARROW = {"gspo", "gspo_token", "luspo"}
"""Losses whose clip range needs an axis of its own."""
RANGES = {"fspo": (0.85, 1.15), "ctpo": (0.85, 1.15), "cispo": (0.1, 8.0), "sapo": (0.1, 8.0)}
"""Ratios drawn, where not from 0.2 to 2.2."""


def weight(name: str, log_ratio: float, advantage: float) -> float:
    """Gradient of the loss by the log-prob of the last of LENGTH tokens that all have `log_ratio`, relative to that at
    0.

    For real the sequence is alone in its group, so that only its own term is there.
    """

    def gradient(shift: float) -> float:
        config_type, loss = LOSSES[name]
        old = [-1.0] * LENGTH
        batch = from_lists([[-1.0 + shift] * LENGTH], [old], [[1] * LENGTH], [advantage], [0], [old])
        out = loss(config_type(), batch)
        return float(torch.autograd.grad(out.loss_sum / out.count, batch.log_probs)[0][-1])

    return gradient(log_ratio) / gradient(0.0)


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(LOSSES)
    columns = 5
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(15, 2.6 * rows), constrained_layout=True)
    for axis, name in zip(axes.flat, names, strict=False):
        low, high = (0.994, 1.006) if name in NARROW else RANGES.get(name, (0.2, 2.2))
        ratios = torch.linspace(low, high, 601, dtype=torch.float64)
        for advantage, colour, label in ((1.0, "tab:blue", "A > 0"), (-1.0, "tab:red", "A < 0")):
            values = [weight(name, float(ratio.log()), advantage) for ratio in ratios]
            style = "-" if advantage > 0 else "--"
            axis.plot(ratios, values, style, color=colour, label=label, linewidth=1.6)
        axis.axvline(1, color="0.8", linewidth=0.8, zorder=0)
        axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(name, fontsize=11)
        axis.set_ylim(-1.1, 5.5 if high > 5 else 2.3)
        axis.tick_params(labelsize=8)
        if name in NARROW:
            axis.set_xticks([0.995, 1.0, 1.005])
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=9, loc="upper right")
    figure.supxlabel(f"ratio pi_theta / pi_old of all {LENGTH} tokens of a sequence")
    figure.supylabel("weight of A d log pi at the last token, relative to ratio 1")
    figure.savefig(path, dpi=110)


def table() -> str:
    lines = ["| `loss.name` | objective (to maximise) and source | divided by | settings and defaults |"]
    lines.append("| --- | --- | --- | --- |")
    shared = {field.name for field in dataclasses.fields(LossConfig)}
    for name, (config_type, function) in LOSSES.items():
        config = config_type()
        settings = [f for f in dataclasses.fields(config) if f.name not in shared and f.name != "aggregation"]
        numbers = ", ".join(f"`{field.name}` {getattr(config, field.name)}" for field in settings)
        lines.append(f"| `{name}` | {_first_paragraph(function)} | {_divisor(name, config)} | {numbers or 'none'} |")
    return "\n".join(lines)


def _first_paragraph(function) -> str:
    text = " ".join(inspect.getdoc(function).split("\n\n")[0].split())
    head, _, formula = text.partition(": ")
    source = re.sub(r"arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", head)
    return f"{source}: {_as_code(formula)}".replace("|", "\\|")


def _as_code(formula: str) -> str:
    """What is to be minimised, with its sign taken away; sentences after it stay text."""
    first, dot, rest = formula.partition(". ")
    first = first.rstrip(".")
    maximised = f"-({first})" if first.startswith("sum") else first.removeprefix("-")
    return f"`{maximised}`" + (f". {rest}" if dot else "")


def _divisor(name: str, config: LossConfig) -> str:
    fixed = {"vespo": "tokens", "real": "groups"}
    choices = {"seq-mean-token-mean": "tokens of the sequence, then sequences", "token-mean": "tokens"}
    if name in NARROW or not hasattr(config, "aggregation"):
        return fixed.get(name, "sequences")
    return choices.get(config.aggregation, "sequences")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    new = f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END)[1]}"
    if check:
        if new != text:
            print("docs/algorithms.md is out of date; run python docs/make_algorithms.py", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    draw(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
