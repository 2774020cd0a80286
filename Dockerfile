# pmtrain on CPU.   docker build -t pmtrain .   docker run --rm -v "$PWD/runs:/app/runs" pmtrain reference configs/tiny.yaml
FROM python:3.12-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY protomodels_cli protomodels_cli
# The CPU build of torch comes from PyTorch's own index: PyPI's Linux build brings CUDA along.
RUN grep '^torch==' constraints.txt > torch.txt \
 && pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu -r torch.txt \
 && pip install --no-cache-dir ".[lab]" -c constraints.txt
COPY configs configs
ENTRYPOINT ["pmtrain"]
CMD ["--help"]
