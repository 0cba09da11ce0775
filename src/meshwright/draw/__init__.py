"""Pictures of plans and runs: facts are plain values (such as ``facts``); renderers only draw them (such as ``terminal``)."""
