# The first stage compiles the codec, the second one runs without a compiler.
FROM python:3.12 AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY redrb redrb
COPY workers workers
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# extras of redrb: what its own recipes need, and further ones such as recipes,accelerate
ARG EXTRAS=recipes
# a package index with another build of torch than PyPI's, such as https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=
WORKDIR /app
COPY constraints.txt ./
COPY --from=build /wheels /wheels
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" torch; \
    fi && \
    pip install --no-cache-dir -c constraints.txt "$(echo /wheels/*.whl)[$EXTRAS]" && rm -r /wheels
STOPSIGNAL SIGTERM
CMD ["redrb", "--help"]
