-- Delete dead letters of a consumer group, or of groups in parts, for good; the ledger goes on counting
-- them as dead.
-- KEYS[1] stream
-- ARGV    the call `DropLetters` of redrb/stream/task/calls.py
-- Returns its reply
--@include task dead_letters permissions

check_permissions(stream)
begin_writing()
local ask, dropped = cmsgpack.unpack(ARGV[1]), 0
for _, seq in ipairs(exists() and ask.seqs or {}) do
  local id = ask.group == '' and seq or letter_id(ask.group, seq)
  dropped = dropped + (id and delete_letter(id, ask.group) or 0)
end
add(task, 'dead_dropped', dropped)
return cmsgpack.pack(dropped)
