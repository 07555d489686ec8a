// Answer serves the name of its pod on port 8080: the smallest thing that shows that a pod runs and can be reached.
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	name, err := os.Hostname()
	if err != nil {
		log.Fatal(err)
	}
	answer := func(writer http.ResponseWriter, _ *http.Request) { fmt.Fprintln(writer, name) }
	server := &http.Server{Addr: ":8080", Handler: http.HandlerFunc(answer)}
	ended, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() {
		<-ended.Done()
		server.Close()
	}()
	if err := server.ListenAndServe(); err != http.ErrServerClosed {
		log.Fatal(err)
	}
}
