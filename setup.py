"""The compiled part of the package; everything else is in `pyproject.toml`."""

from setuptools import Extension, setup

# optional: where it cannot be compiled, redrb.codec runs in plain Python
setup(
    ext_modules=[
        Extension(
            "redrb.codec._core",
            ["redrb/codec/_encode.c", "redrb/codec/_decode.c"],
            depends=["redrb/codec/_core.h"],
            extra_compile_args=["-O3", "-fno-strict-aliasing"],
            optional=True,
        )
    ]
)
