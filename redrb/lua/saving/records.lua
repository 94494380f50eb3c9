-- Read the records of groups whose entries were read just before. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `ReadRecords` of redrb/stream/saving/calls.py
-- Returns its reply, and behind it the facts of each group, '' if it has none
--@include task put_record groups pending

if not exists() then
  return {cmsgpack.pack({last = -1})}
end
local ask, all, facts = cmsgpack.unpack(ARGV[1]), {}, {}
local joined = {}
for at, group in ipairs(ask.groups) do
  joined[at] = redis.call('SISMEMBER', key('groups'), group) == 1
end
for i, seq in ipairs(ask.seqs) do
  local member, needs = member_of(seq), {}
  facts[i] = redis.call('HGET', key('facts'), member) or ''
  for at, group in ipairs(ask.groups) do
    if joined[at] and (waits_in(group, seq) or is_leased(group, seq)) then
      needs[#needs + 1] = {at - 1, redis.call('HGET', key('moved', group), member) or '',
        redis.call('HGET', key('expiries', group), member) or '',
        tonumber(redis.call('HGET', key('deliveries', group), member) or '0'),
        tonumber(redis.call('HGET', key('reads', group), member) or '0')}
    end
  end
  all[i] = needs
end
return {cmsgpack.pack({last = last_counted(), needs = all}), unpack(facts)}
