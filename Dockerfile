# The trainer in a container: the same release as on a node, a compiler for torch.compile, no root, no secrets.
# `make image` builds it on a base that is made on this machine, without a registry. Who has one, and Debian 12 there:
#   docker build --build-arg BASE=debian:bookworm-slim@sha256:… --tag aura-trainer .
# (Only what both of Docker's builders know.)
ARG BASE=aura-base

FROM ${BASE} AS system
# g++ and Python.h are for torch.compile. ip finds the network card that leads to MASTER_ADDR.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ iproute2 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM system AS release
ARG TORCH=cu130
ARG RELEASE=image
COPY container/make-release container/image-tools requirements roles/python_env/files roles/trainer/files /build/
COPY training /build/training
# What `make image` has downloaded. Without it (nothing matches the pattern) it is downloaded here.
COPY container/make-release dist/wheelhous[e] /opt/aura/wheelhouse/
RUN /build/make-release "$RELEASE" "$TORCH"

FROM system
ARG RELEASE=image
COPY --from=release /opt/aura/releases /opt/aura/releases
COPY container/entrypoint /opt/aura/entrypoint
COPY container/guide /opt/aura/guide
# /etc/profile forgets the PATH of below: `bash -l`, as the guide types it, reads this. Anybody may be the user, so the home
# is everybody's. What the guide calls ./Data is a directory of the machine outside.
RUN ln -s "releases/$RELEASE" /opt/aura/current \
    && echo 'PATH=/opt/aura/current/venv/bin:$PATH' >/etc/profile.d/aura.sh \
    && mkdir --mode=1777 /home/aura \
    && cd /opt/aura/guide && ln -s /workspace/Data /workspace/checkpoints /workspace/runs .
ENV PATH=/opt/aura/current/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/aura USER=aura LANG=C.UTF-8 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /opt/aura/guide
ENTRYPOINT ["/opt/aura/entrypoint"]
CMD ["bash"]
