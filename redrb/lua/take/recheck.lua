-- Look at a batch once more when it is handed over, some time after its take: if one of its groups has
-- become too stale, the whole batch is requeued, a page at a time, and the groups that are too stale expire.
-- KEYS[1] stream
-- ARGV    the call `Recheck` of redrb/stream/take/calls.py
-- Returns its reply. Repeated, it changes nothing more.
--@include task facts

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local group, slot, token = ask.group, ask.slot, ask.token
local held = redis.call('HGET', key('leases', group), slot)
if string.match(held or '', '^%d+') ~= token or string.find(held, ' ended', 1, true) then
  return cmsgpack.pack({fresh = false})
end
local members, stale = {}, held == token .. ' lost'
for i, seq in ipairs(ask.seqs) do
  members[i] = member_of(seq)
end
for _, facts in ipairs(stale and {} or facts_of_all(members)) do
  stale = stale or facts and is_overdue(facts)
end
if not stale then
  return cmsgpack.pack({fresh = true})
end

--@include leases staleness waking
local _, emptied = return_slot(group, slot, false, PAGE.taken_over)
local _, more = expire_overdue(group, ask.status)
wake_room()
wake_entered()
return cmsgpack.pack({more = more or not emptied})
