"""Object storage (S3, Cloudflare R2, MinIO): addresses, objects, and what is kept of them on this machine."""
