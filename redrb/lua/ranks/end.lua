-- A rank's time is up: end the attempt to form the next step, for all ranks that asked for it.
-- KEYS[1] stream
-- ARGV    group, attempt, counts
--         counts: numbers of groups and producers, for the errors of the ranks
-- Returns 'ended': by this call or an earlier one | 'formed': a step was formed, or there is no attempt
--@include task attempts

begin_writing()
local group, ranks = ARGV[1], key('ranks', ARGV[1])
local state, none = numbers(ranks, 'attempt', 'ended')
if none or state[1] ~= tonumber(ARGV[2]) then
  return state[2] >= tonumber(ARGV[2]) and 'ended' or 'formed'
end
end_attempt(group, 'short', ARGV[3], missing_in(group, state[1]))
return 'ended'
