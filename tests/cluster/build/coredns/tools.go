//go:build tools

// Package tools names the program that is built from this module.
package tools

import _ "github.com/coredns/coredns"
