"""Language models with fixed-point layers: model, kernels, training, export and evaluation.

Importing it imports nothing else, so that `fprnn --help` starts quickly. `import fprnn` is the
Python API.
"""

__version__ = "0.2.0"
