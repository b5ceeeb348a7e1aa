"""One layer for all processes that Quire starts: engines, ranks, nodes, API workers, text workers and grammar workers.

    spawn        start a process (directly or by a fork server), set it up, let it end with its parent, collect its log
    fork_server  a process with all imports done, which forks others in milliseconds
    channel      length-prefixed frames over a stream socket: `Frames` (blocking), `Channel` (never blocks), `AsyncChannel`
    messages     msgspec structs as frames: one encoder, one decoder for each direction, numpy arrays of listed dtypes;
                 calls whose replies arrive later, as futures
    liveness     heartbeats, the silence of a process, and how often it may be restarted

A kind of process is described in about 30 lines. Its messages:

    class Tokenize(WireMessage): text: str; id: int
    class Tokens(WireMessage): ids: list[int]; id: int
    decode_command = decoder(Tokenize)
    decode_report = decoder(Tokens)

The parent starts it, sends commands, and replaces it when it dies:

    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn(command_of("quire.text.worker"), [PARENT, "{0}"], [theirs.fileno()], with_thread=True)
    channel, calls, restarts = AsyncChannel(ours), PendingCalls(), RestartLimit(max_restarts=3, window_s=60.0)
    tokens = await calls.ask(lambda number: channel.send(Tokenize(text, number)))

    async def on_frame(frame):                      # until the process is gone:
        report = decode_report(frame)               #   await channel.listen(on_frame)
        calls.resolve(report.id, report.ids)         #   if restarts.allow(): start the next one

The process itself:

    def main(argv=None) -> int:
        parent, number, *options = sys.argv[1:] if argv is None else argv
        if not set_up("text", options, parent=parent, descriptors=[number]):
            return 1
        frames = Frames(socket.socket(fileno=int(number)))
        while (frame := frames.wait()) is not None:
            command = decode_command(frame)
            frames.send(encode(Tokens(tokenize(command.text), command.id)))
        return 0

Frames are bounded: a peer on another machine gets a small limit until its handshake is checked (`Channel.allow`). Peers on
one machine run the same code. Machines compare their versions in the handshake (`engine/handshake.py`) before the first frame.
Nothing received is ever executed or unpickled.
"""
