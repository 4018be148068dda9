"""The roofline of rope_kv_write on this machine, as a PNG."""

from __future__ import annotations

import textwrap
from typing import Any

from hal._errors import HalError

NEEDS = "needs matplotlib — pip install 'hal-kernels[bench]'"
_COLOURS = {
    "hal": "#d1495b",
    "torch.compile": "#edae49",
    "eager": "#66a182",
    "reference": "#8d96a3",
    "memcpy": "#2e4057",
}


def roofline(run: dict[str, Any], file: str) -> None:
    """Bytes moved per second over the size of the call, with memcpy of as many bytes as the roof.

    Raises:
        HalError: matplotlib is not installed, or the run has no rope_kv_write with memcpy beside it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise HalError(f"hal: bench: --plot {NEEDS}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [r for r in run["rows"] if r["op"] == "rope_kv_write" and "memcpy" in r.get("wall_us", ())]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["dtype"]), []).append(row)
    groups = {k: v for k, v in groups.items() if len(v) > 1}
    if not groups:
        raise HalError("hal: bench --plot needs the table rope_kv_write of a CPU run")
    inches = 4.2 * len(groups)
    figure, axes = plt.subplots(
        1, len(groups), figsize=(inches, 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, ((model, dtype), some) in zip(axes[0], groups.items(), strict=True):
        tokens = [r["tokens"] for r in some]
        for name in _COLOURS:
            speed = [r["work"]["bytes"] / r["best"][name] / 1e3 if name in r["best"] else None for r in some]
            if any(speed):
                roof = name == "memcpy"
                axis.plot(
                    tokens, speed, "--" if roof else "o-", color=_COLOURS[name],
                    label="memcpy: the roof" if roof else name, linewidth=2.5 if name == "hal" else 1.5,
                )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"{model}, {dtype}", xticks=tokens)
        axis.set_xticklabels(map(str, tokens))
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("GB/s read and written")
    axes[0][0].legend(frameon=False)
    figure.suptitle(title(run, inches), fontsize=11)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def title(run: dict[str, Any], inches: float) -> str:
    """What was measured where, in lines that fit a figure of that width at 11 points."""
    about = run["machine"]
    told = f"rope_kv_write on {about['cpu']}, {about['threads']} threads, best of all calls"
    quick = ["quick: few rounds, no numbers to quote"] if run.get("quick") else []
    return "\n".join([*textwrap.wrap(told, int(inches * 11)), *quick])
