FROM python:3.12-slim
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY redrb redrb
COPY workers workers
RUN pip install --no-cache-dir -c constraints.txt .
STOPSIGNAL SIGTERM
CMD ["redrb", "--help"]
