# A server of one model: the static program and nothing else. `cargo xtask release` makes the context, target/release-files/image.
#
#   docker build --tag t5-server --file packaging/serve.Dockerfile target/release-files/image
#   docker run --rm --publish 127.0.0.1:8080:8080 --memory 1g --volume "$PWD/model:/model:ro" --volume "$PWD/keys:/keys:ro" t5-server
FROM scratch
COPY train_low_mem /train_low_mem
COPY THIRD-PARTY-NOTICES.txt /THIRD-PARTY-NOTICES.txt
EXPOSE 8080
# There is no shell and no HTTP client here: the program asks itself.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["/train_low_mem", "doctor", "--server", "127.0.0.1:8080"]
ENTRYPOINT ["/train_low_mem"]
CMD ["serve", "/model", "--listen", "0.0.0.0:8080", "--api-key-file", "/keys", "--memory-budget", "600MiB"]
