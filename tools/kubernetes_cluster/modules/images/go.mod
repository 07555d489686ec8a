module fumehood.dev/tools/images

go 1.26.0
