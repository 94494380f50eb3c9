-- Remove a consumer group, its dead letters, and the entries that no other group needs, some dozens
-- at a time.
-- KEYS[1] stream
-- ARGV    the call `DropGroup` of redrb/stream/task/calls.py
-- Returns the page: entries deleted. Until the last call the group is a member of the task, with fewer and
--         fewer groups
--@include task facts pools waking groups ended_elsewhere removal permissions

check_permissions(KEYS[1])
begin_writing()
local ask, deleted, seqs, leased, most = cmsgpack.unpack(ARGV[1]), 0, {}, {}, PAGE.ended_of_group
local group = ask.group
if not exists() or redis.call('SISMEMBER', key('groups'), group) == 0 then
  return cmsgpack.pack({found = 0})
end
local pending = redis.call('XPENDING', stream, group, '-', '+', most)
lose_all(group, pending) -- before the first of their groups goes
for i, entry in ipairs(pending) do
  leased[i], seqs[i] = entry[1], seq_of(entry[1])
end
if #leased > 0 then
  redis.call('XACK', stream, group, unpack(leased))
end
if #groups() == 1 then -- the entries stay, for consumer groups to come
  let_evict(seqs)
else
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    local members = #seqs < most and redis.call('ZRANGE', key('ready', pool), 0, most - #seqs - 1) or {}
    if #members > 0 then
      withdraw(group, pool, members)
    end
    for _, member in ipairs(members) do
      seqs[#seqs + 1] = tonumber(member)
    end
  end
  deleted = forget(group, seqs)
end
add(key('group', group), 'evicted', #seqs)
local letters = #seqs < most and redis.call('ZRANGE', key('letters', group), 0, most - #seqs - 1) or {}
if #letters > 0 then -- without the ledger that counts them nobody can requeue them
  redis.call('XDEL', key('dead'), unpack(letters))
  redis.call('ZREM', key('letters', group), unpack(letters))
  redis.call('ZREM', key('buried'), unpack(letters))
  add(task, 'dead_dropped', #letters)
end
if #seqs + #letters == most then
  return cmsgpack.pack({more = true, found = deleted})
end
redis.call('SREM', key('groups'), group)
redis.call('XGROUP', 'DESTROY', stream, group)
delete_group(group)
wake_room()
return cmsgpack.pack({found = deleted})
