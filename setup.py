"""The compiled part of the package; everything else is in `pyproject.toml`."""

from setuptools import Extension, setup

# optional: where it cannot be compiled, redrb.codec runs in plain Python
setup(
    ext_modules=[
        Extension(
            "redrb.codec._core",
            [f"redrb/codec/_{part}.c" for part in ("encode", "decode", "gather")],
            depends=["redrb/codec/_core.h"],
            extra_compile_args=["-O3", "-fno-strict-aliasing"],
            optional=True,
        )
    ]
)
