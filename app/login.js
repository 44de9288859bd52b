// The login page: sends the password and opens the page. The cookie is set by the server.
document.getElementById("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = document.getElementById("password").value;
  const answer = await fetch("/login", { method: "POST", body });
  if (answer.ok) location.href = "/";
  else document.getElementById("problem").textContent = "That is not the password.";
});
