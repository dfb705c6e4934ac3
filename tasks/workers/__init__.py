"""Where work runs: processes of this machine or a Dask cluster; progress and usage."""
