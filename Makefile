# Only `docs`; the other targets come with the rest of the project.
PYTHON ?= python

.PHONY: docs
docs:  ## the page of the knowledge base, checked first, into docs/_build
	$(PYTHON) -m halfstep kb validate
	mkdir -p docs/_build
	$(PYTHON) -m halfstep kb export --format html --output docs/_build/knowledge_base.html
