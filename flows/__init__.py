"""When and where the pipeline runs. The import sets environment defaults, before Prefect reads them."""

from flows.environment import apply_defaults

apply_defaults()
