"""Tables as LaTeX, as a paper prints them: `\\begin{tabular}` with the lines of booktabs."""

from __future__ import annotations

from collections.abc import Sequence

# First line of a file, by which an earlier one is known.
LATEX_HEAD = "% \\usepackage{booktabs}  (and amssymb where there is a \\checkmark)"
# Signs that our tables hold and that pdflatex does not know, or reads as commands.
_SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "ℓ": r"$\ell$",
    "λ": r"$\lambda$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "…": r"\dots{}",
    "×": r"$\times$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "∞": r"$\infty$",
    "‖": r"$\Vert$",
    "∂": r"$\partial$",
    "✓": r"\checkmark{}",  # of amssymb
}


def document(tables: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """Tables under one another, each with its title as a comment: a file to copy from."""
    parts = [f"% {' '.join(title.split())}\n{tabular(rows)}" for title, rows in tables]
    return "\n\n".join([LATEX_HEAD, *parts]) + "\n"


def tabular(rows: Sequence[Sequence[str]]) -> str:
    """Rows of plain text, the first being the head; the first column to the left, numbers to the
    right."""
    head, *body = (" & ".join(map(escaped, row)) + r" \\" for row in rows)
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def escaped(text: str) -> str:
    """Plain text of one cell: nothing in it is read as a command."""
    plain = "".join(_SIGNS.get(sign, sign) for sign in " ".join(text.split()))
    return plain.replace(r"$\ell$*", r"$\ell^*$")
