-- Expire the waiting entries that are named by their seq. Leased entries are left alone.
-- KEYS[1] stream
-- ARGV    the call `Discard` of redrb/stream/task/calls.py
-- Returns its reply
--@include task pools waking groups permissions

check_permissions(KEYS[1])
begin_writing()
local ask, found = cmsgpack.unpack(ARGV[1]), {}
local group = ask.group
if not exists() then
  return cmsgpack.pack(0)
end
for _, seq in ipairs(ask.seqs) do
  local pool = waits_in(group, seq)
  if pool then
    withdraw(group, pool, {member_of(seq)})
    redis.call('HDEL', key('deliveries', group), member_of(seq))
    found[#found + 1] = seq
  end
end
add(key('group', group), 'expired', #found)
forget(group, found)
wake_room()
return cmsgpack.pack(#found)
