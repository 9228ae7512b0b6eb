"""The live page: static files without a build step, served by the gateway at `/`. See docs/decisions/0006-page-without-a-framework.md."""
