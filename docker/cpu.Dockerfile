# vtk on CPUs: packs, banks, ONNX files, training. Not built or run by this project: see docs/guides/docker.md.
# docker build -f docker/cpu.Dockerfile -t vtk-cpu .
FROM python:3.11-slim

# for the `compile` back-end and AOTInductor; leave it out if neither is used
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/vtk
# an index of PyTorch builds for CPUs; without one, pip takes those for CUDA, which are larger and run on CPUs, too
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision
COPY requirements/cpu-server.txt requirements/cpu-server.txt
RUN pip install --no-cache-dir -r requirements/cpu-server.txt

COPY pyproject.toml README.md LICENSE ./
COPY vtk vtk
COPY kernels kernels
COPY export export
RUN pip install --no-cache-dir --no-deps .

RUN useradd --create-home vtk && mkdir /models && chown vtk /models
USER vtk
WORKDIR /home/vtk
# base weights: packs need them, so keep this folder in a volume
ENV VTK_HOME=/models
VOLUME /models

ENTRYPOINT ["vtk"]
CMD ["doctor"]
