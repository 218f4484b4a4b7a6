"""When and where the pipeline runs. Importing the package sets the environment's defaults before Prefect reads them."""

from flows.environment import apply_defaults

apply_defaults()
