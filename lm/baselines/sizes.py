"""Numbers of heads and widths that the model section leaves open, and what is wrong with others."""

from lm.common.errors import ConfigError
from lm.config.model import Model


def heads(model: Model, width: int, what: str) -> int:
    """Number of heads of a layer `width` wide, which is `what` in the words of the config.

    `n_heads`, or as many of `headdim` as fit: one where the layer is narrower than that.

    Raises:
        ConfigError: they do not divide the width.
    """
    if model.n_heads != "auto":
        if width % model.n_heads:
            near = max(h for h in range(1, model.n_heads) if width % h == 0)
            raise ConfigError(
                f"model.n_heads is {model.n_heads}: it must divide {what} = {width}, as {near} does"
            )
        return model.n_heads
    if width > model.headdim and width % model.headdim:
        raise ConfigError(
            f"model.headdim is {model.headdim}: it must divide {what} = {width}; or set"
            " model.n_heads"
        )
    return max(1, width // model.headdim)


def d_ff(model: Model) -> int:
    """Width inside the SwiGLU: 8/3 · d_model, rounded up to a multiple of 64 (Llama's rule)."""
    return -(-8 * model.d_model // (3 * 64)) * 64 if model.d_ff == "auto" else model.d_ff
