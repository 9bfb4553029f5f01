# vtk on NVIDIA GPUs: everything. Not built or run by this project: see docs/guides/docker.md.
# docker build -f docker/cuda.Dockerfile -t vtk-cuda .
FROM python:3.11-slim

# PyTorch's packages bring the CUDA libraries; the driver comes from the host. Triton compiles its launchers with gcc.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/vtk
COPY pyproject.toml README.md LICENSE ./
COPY vtk vtk
COPY kernels kernels
COPY export export
RUN pip install --no-cache-dir '.[nvml]'

RUN useradd --create-home vtk && mkdir /models && chown vtk /models
USER vtk
WORKDIR /home/vtk
# base weights: packs need them, so keep this folder in a volume
ENV VTK_HOME=/models
VOLUME /models

ENTRYPOINT ["vtk"]
CMD ["doctor"]
