# The first stage compiles the codec, the second one runs without a compiler.
FROM python:3.12 AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY redrb redrb
COPY workers workers
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
WORKDIR /app
COPY constraints.txt ./
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c constraints.txt /wheels/*.whl && rm -r /wheels
STOPSIGNAL SIGTERM
CMD ["redrb", "--help"]
