//go:build tools

// Package tools pins what is built from here.
package tools

import _ "github.com/fluxcd/source-controller"
