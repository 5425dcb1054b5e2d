# pclmix on a CPU:
#   docker build -t pclmix .
#   docker run --rm pclmix --help
# docs/deployment.md has the calls with data, and for the workbench.
ARG PYTHON=python:3.12.11-slim-bookworm

FROM ${PYTHON} AS build
# On x86 the default index has CUDA builds only, of several GB; of one version pip prefers the build with a label, +cpu.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/pclmix
WORKDIR /src
COPY constraints.txt ./
RUN /opt/pclmix/bin/pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY . .
RUN /opt/pclmix/bin/pip install --constraint constraints.txt '.[web,export,dicom,tiff]'

FROM ${PYTHON}
RUN useradd --create-home --uid 1000 pclmix && mkdir /data && chown pclmix: /data
COPY --from=build /opt/pclmix /opt/pclmix
# Caches are writable for every user, so that `docker run --user` works.
ENV PATH=/opt/pclmix/bin:$PATH \
    PCLMIX_CACHE=/tmp/pclmix \
    MPLCONFIGDIR=/tmp/matplotlib \
    OMP_WAIT_POLICY=PASSIVE
USER 1000
WORKDIR /data
EXPOSE 8765
ENTRYPOINT ["pclmix"]
CMD ["--help"]
